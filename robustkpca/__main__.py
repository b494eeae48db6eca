from robustkpca.cli import main

main()
