"""PURE: settings + inventory -> NodePlan. No I/O, no clock.

``model`` owns the types that the rest of the house fills in (``host`` the inventory) or carries out
(``units`` the unit specifications).
"""
