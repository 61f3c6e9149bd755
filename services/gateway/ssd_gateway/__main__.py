from ssd_gateway.cli import main

main()
