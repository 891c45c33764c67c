//! RabbitMQ as the queue.
