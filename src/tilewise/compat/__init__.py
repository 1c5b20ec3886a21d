"""Other libraries' interfaces, by translation. A module imports the library whose interface it is, if it needs any."""
