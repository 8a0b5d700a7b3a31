from europa_exp.cli import main

main()
