"""One module a property: ``check(session)`` returns nothing and raises ``Rejection`` where the property does not hold."""
