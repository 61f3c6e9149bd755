"""The engine process: its loop over scheduler, model and speculation."""
