"""The types of OpenAI's API, without torch and HTTP: requests, decode settings, answers and errors."""
