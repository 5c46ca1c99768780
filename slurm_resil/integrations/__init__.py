"""What lets other libraries save and restore with this one."""
