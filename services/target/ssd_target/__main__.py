from ssd_target.cli import main

main()
