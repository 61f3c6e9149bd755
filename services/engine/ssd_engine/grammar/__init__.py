"""What a text must be: grammars, and which tokens can go on with one."""
