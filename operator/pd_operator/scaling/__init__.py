"""How many workers each pool needs: readings -> rates -> learned capacity -> decisions."""
