"""`python -m ssd_client` is `ssd-client`."""

from ssd_client.cli import main

if __name__ == "__main__":
    main()
