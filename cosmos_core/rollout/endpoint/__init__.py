"""An endpoint of OpenAI's API for agents: requests and replies of chats and responses, and the server of them."""
