"""The HTTP server of `specdec serve`. The engine knows no HTTP, and the requests and responses know no server."""
