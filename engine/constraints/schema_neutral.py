"""Rewrites keywords that llguidance lacks where they restrict nothing, or say what others can say.

https://json-schema.org/draft/2020-12/json-schema-core, https://json-schema.org/draft/2020-12/json-schema-validation
"""

from typing import Any

from engine.constraints.schema_disjoint import DisjointSchemas
from engine.constraints.schema_patterns import readable_strings
from engine.constraints.schema_unique import UniqueItems
from engine.constraints.schema_walk import ANNOTATIONS, inner_schemas, is_any, resolved, rewritten

# Keywords that are dropped where their value restricts nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
OPEN = ("unevaluatedProperties", "unevaluatedItems", "contentSchema")
OF_NAMES = frozenset(("minLength", "maxLength"))


def expressible(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an equal schema that has fewer keywords which llguidance lacks.

    References by `$id` and `$anchor` become paths; a `oneOf` whose schemas exclude each other becomes an
    `anyOf`, and arrays without repeated items are listed.
    """
    root = _with_paths(schema)
    disjoint, unique = DisjointSchemas(root), UniqueItems(root)

    def change(node: dict[str, Any]) -> Any:
        found = _expressible(root, node, disjoint)
        return unique.rewrite(found) if isinstance(found, dict) else found

    found = rewritten(root, change)
    return found if isinstance(found, dict) else {"not": {}}


def _with_paths(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its references to names as references to paths."""
    places: dict[str, str] = {}
    for path, node in inner_schemas(schema):
        for key, prefix in (("$id", ""), ("$anchor", "#")):
            if isinstance(name := node.get(key), str):
                pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)
                places.setdefault(prefix + name, "#" + pointer.replace("%", "%25"))

    def replace(node: dict[str, Any]) -> dict[str, Any]:
        reference = node.get("$ref")
        return (
            node | {"$ref": places[reference]} if isinstance(reference, str) and reference in places else node
        )

    found: dict[str, Any] = rewritten(schema, replace) if places else schema
    return found


def _expressible(root: dict[str, Any], node: dict[str, Any], disjoint: DisjointSchemas) -> Any:
    found = {
        key: value
        for key, value in node.items()
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(key, ()))
        and not (key in OPEN and is_any(value))
    }
    if is_any(found.get("not")):
        return False  # nothing matches
    _drop_halves(found)
    _rewrite_names(root, found)
    _rewrite_one_of(root, found, disjoint)
    return readable_strings(found)


def _drop_halves(node: dict[str, Any]) -> None:
    """Drop keywords that have no effect without another one."""
    if "contains" in node and node.get("minContains") == 0 and "maxContains" not in node:
        del node["contains"]
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
    if "if" not in node or all(is_any(node.get(key, True)) for key in ("then", "else")):
        for key in ("if", "then", "else"):
            node.pop(key, None)
    if node.get("unevaluatedProperties") is False and not node.keys() & {
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
        "if",
    }:
        node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))


def _rewrite_names(root: dict[str, Any], node: dict[str, Any]) -> None:
    """Say with other keywords what `propertyNames` says, if they can."""
    if "propertyNames" not in node:
        return
    names = resolved(root, node["propertyNames"])
    if isinstance(names, dict):
        names = readable_strings({key: value for key, value in names.items() if key not in ANNOTATIONS})
        if names.get("type") == "string":
            del names["type"]
    if is_any(names):
        del node["propertyNames"]
        return
    others = node.get("additionalProperties", True)
    properties = node.get("properties", {})
    if not isinstance(names, dict) or "patternProperties" in node or not isinstance(properties, dict):
        return
    allowed = [names["const"]] if names.keys() == {"const"} else names.get("enum")
    if names.keys() <= {"const", "enum"} and isinstance(allowed, list):
        known = {name: schema if name in allowed else False for name, schema in properties.items()}
        node["properties"] = known | {
            name: others for name in allowed if isinstance(name, str) and name not in known
        }
    elif properties:
        return
    elif names.keys() == {"pattern"}:
        node["patternProperties"] = {names["pattern"]: others}
    elif names.keys() <= OF_NAMES:
        bounds = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        node["patternProperties"] = {rf"^[\s\S]{{{bounds}}}$": others}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _rewrite_one_of(root: dict[str, Any], node: dict[str, Any], disjoint: DisjointSchemas) -> None:
    """Say with `anyOf` what a `oneOf` says whose schemas exclude each other.

    With a `discriminator`, as OpenAPI has it, each of them requires the property that it names.
    """
    parts = node.get("oneOf")
    if not isinstance(parts, list) or "anyOf" in node:
        return
    discriminator = node.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    tagged = [_requiring(root, part, name) for part in parts] if isinstance(name, str) else parts
    if disjoint.are_disjoint(tagged):
        del node["oneOf"]
        node["anyOf"] = tagged


def _requiring(root: dict[str, Any], schema: Any, name: str) -> Any:
    """Return a schema that requires a property, too."""
    whole = resolved(root, schema)
    if not isinstance(whole, dict) or name in (whole.get("required") or ()):
        return schema
    names = schema.get("required")
    return schema | {"required": [*(names if isinstance(names, list) else ()), name]}
