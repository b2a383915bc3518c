"""How a run is presented: curves.png and a table when it ends, and the HTML page of `spiral-mega report`."""
