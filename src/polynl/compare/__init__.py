"""`polynl compare`: is one trained network better than another?"""
