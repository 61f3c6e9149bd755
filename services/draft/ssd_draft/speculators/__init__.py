"""What speculations are made with, behind one interface."""
