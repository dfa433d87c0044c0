"""An HTTP server in OpenAI's shape over the runtime's engine. Needs the extra [serve]."""
