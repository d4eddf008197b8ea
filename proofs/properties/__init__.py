"""One module a property: ``check(session)`` raises ``Rejection`` where the property does not hold."""
