from ssd_draft.cli import main

main()
