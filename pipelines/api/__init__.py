"""Floor 4, the shapes of OpenAI's API without a server: requests, the settings that they mean, answers and errors. No torch, no HTTP."""
