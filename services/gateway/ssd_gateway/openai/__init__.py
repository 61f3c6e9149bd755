"""OpenAI's requests and answers, and their translation to the targets' contract."""
