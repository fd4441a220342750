from store_servers import redis_server, s3_server

__all__ = ["redis_server", "s3_server"]
