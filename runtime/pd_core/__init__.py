"""What more than one program must agree on. Pure: imports the standard library only."""
