"""The blocks as other libraries want them; each module here needs the library that it is named after."""
