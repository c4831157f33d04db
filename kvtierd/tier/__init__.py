"""The pool as a whole: is it usable, what must happen after the MetaService died, who may join when."""
