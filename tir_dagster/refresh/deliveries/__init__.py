"""How an extract reaches Tableau: one module per delivery."""
