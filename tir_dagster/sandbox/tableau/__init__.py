"""The Tableau Server stand-in: the REST calls a publisher and refresher uses, over HTTP, with real extracts behind them."""
