"""What a model's author has written to be run, in processes with little memory and time.

Chat templates are programs, and the rules of a tokenizer are nearly that. Jinja's sandbox keeps a
template away from Python, but not from running for ever; and a library that reads the rules of a
tokenizer may end its process. Here they end a child at most, and the service says why.
"""
