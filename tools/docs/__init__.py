"""Generated pages of docs/, and the check of every command and snippet in the documentation."""
