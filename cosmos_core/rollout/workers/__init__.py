"""Worker processes of a replica: started, asked over a pipe, replaced."""
