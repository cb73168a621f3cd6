"""Other engines on the same pair, prompts and machine: what Outrider's figures are to be read beside."""
