"""`specdec serve`: OpenAI's interface over HTTP. The engine knows no HTTP, the requests and answers know no server."""
