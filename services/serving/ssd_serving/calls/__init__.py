"""What every gRPC call passes through, and the calls that every service answers."""
