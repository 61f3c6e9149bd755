"""What a model's author has written to be run, in processes with little memory and time."""
