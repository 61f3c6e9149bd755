"""Who may call: certificates, tokens and allowances."""
