"""`ssd-client race`: one text, told by each mode after the other, side by side on the screen."""
