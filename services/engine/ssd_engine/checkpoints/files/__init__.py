"""Files that strangers have written, read with bounds and with errors that name the field."""
