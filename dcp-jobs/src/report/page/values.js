// Values as Python writes them, from the JSON in which what JSON lacks is {"type": …}.

// Characters of a line, beyond which a container has a line for each of its items.
const LINE = 72;

const tag = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) && typeof value.type === "string"
    ? value.type : null;

// What Python calls the value's type.
function typeName(value) {
  if (value === null) return "None";
  if (Array.isArray(value)) return "list";
  const kind = tag(value);
  if (kind) return kind;
  return { boolean: "bool", string: "str", object: "dict" }[typeof value]
    || (Number.isInteger(value) ? "int" : "float");
}

// A character that cannot be seen, or that would turn the text around, as its number.
const printable = (text) => text.replace(
  /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
  (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

const quoted = (text) => `'${printable(text.replace(/[\\']/g, "\\$&").replace(/\n/g, "\\n"))}'`;

function python(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return quoted(value);
  if (typeof value === "number") return String(value);
  if (Array.isArray(value)) return enclosed("[", value.map((item) => [item]), "]", indent);
  const kind = tag(value);
  const pairs = (all) => all.map(([key, item]) => [item, `${python(key)}: `]);
  if (!kind) return enclosed("{", pairs(Object.entries(value)), "}", indent);
  const items = (value.items || []).map((item) => [item]);
  switch (kind) {
    case "int":
    case "float": return printable(String(value.value));
    case "complex": return `complex(${python(value.real)}, ${python(value.imag)})`;
    case "global": return printable(String(value.name));
    case "truncated": return value.left_out ? `… ${number(value.left_out)} more` : "…";
    case "unreadable": return `unreadable: ${printable(String(value.error || ""))}`;
    case "bytes":
    case "bytearray": return `${kind}.fromhex('${value.hex}${value.bytes ? "…" : ""}')`;
    case "tuple": return items.length === 1 ? `(${python(items[0][0], indent)},)` : enclosed("(", items, ")", indent);
    case "set": return items.length ? enclosed("{", items, "}", indent) : "set()";
    case "frozenset": return enclosed("frozenset({", items, "})", indent);
    case "dict": return enclosed("{", pairs(value.entries || []), "}", indent);
    default: {
      const rest = Object.entries(value).filter(([name]) => name !== "type");
      return enclosed(`${printable(kind)}(`, rest.map(([name, item]) => [item, `${printable(name)}=`]), ")", indent);
    }
  }
}

function enclosed(open, items, close, indent) {
  const inner = `${indent}  `;
  const texts = items.map(([item, before = ""]) => before + python(item, inner));
  const line = open + texts.join(", ") + close;
  if (indent.length + line.length <= LINE && !line.includes("\n")) return line;
  return `${open}\n${texts.map((text) => inner + text).join(",\n")}\n${indent}${close}`;
}

// The value in one short line.
function brief(value) {
  const text = python(value).replace(/\s*\n\s*/g, " ");
  return text.length > 120 ? `${text.slice(0, 119)}…` : text;
}
