"""`ssd-client chat`: a conversation that streams, and says how each word was found."""
