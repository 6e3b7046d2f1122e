"""What looks at the loop from outside: measures it, predicts it, shows it. Nothing of it is needed to train."""
