//! Objects in one line, as Python writes them.

use serde_json::{Map, Value};

/// The text of a value in the tagged JSON of `dcp inspect --json`, ended by `…` soon after `limit`
/// bytes.
pub(crate) fn python(value: &Value, limit: usize) -> String {
    let mut writer = Writer { text: String::new(), limit };
    writer.value(value);
    writer.text
}

struct Writer {
    text: String,
    limit: usize,
}

impl Writer {
    fn is_full(&self) -> bool {
        self.text.len() > self.limit
    }

    fn value(&mut self, value: &Value) {
        if self.is_full() {
            if !self.text.ends_with('…') {
                self.text.push('…');
            }
            return;
        }
        match value {
            Value::Null => self.text.push_str("None"),
            Value::Bool(true) => self.text.push_str("True"),
            Value::Bool(false) => self.text.push_str("False"),
            Value::Number(number) => self.text.push_str(&number.to_string()),
            Value::String(text) => self.quoted(text),
            Value::Array(items) => self.list("[", items, "]"),
            Value::Object(map) => match map.get("type").and_then(Value::as_str) {
                Some(kind) => self.tagged(kind, map),
                None => {
                    let entries = map.iter().map(|(key, value)| (Value::from(key.as_str()), value));
                    self.dict(entries);
                }
            },
        }
    }

    fn quoted(&mut self, text: &str) {
        self.text.push('\'');
        for c in text.chars() {
            match c {
                '\'' | '\\' => self.text.extend(['\\', c]),
                c if c.is_control() => self.text.extend(c.escape_default()),
                c => self.text.push(c),
            }
            if self.is_full() {
                self.text.push('…');
                return;
            }
        }
        self.text.push('\'');
    }

    fn list(&mut self, open: &str, items: &[Value], close: &str) {
        self.text.push_str(open);
        for (index, item) in items.iter().enumerate() {
            if self.is_full() {
                break;
            }
            if index > 0 {
                self.text.push_str(", ");
            }
            self.value(item);
        }
        self.text.push_str(close);
    }

    fn dict<'a>(&mut self, entries: impl Iterator<Item = (Value, &'a Value)>) {
        self.text.push('{');
        for (index, (key, value)) in entries.enumerate() {
            if self.is_full() {
                break;
            }
            if index > 0 {
                self.text.push_str(", ");
            }
            self.value(&key);
            self.text.push_str(": ");
            self.value(value);
        }
        self.text.push('}');
    }

    fn tagged(&mut self, kind: &str, map: &Map<String, Value>) {
        let text = |field: &str| map.get(field).and_then(Value::as_str).unwrap_or_default();
        let items = |field: &str| map.get(field).and_then(Value::as_array).map(Vec::as_slice);
        match kind {
            "int" | "float" => self.text.push_str(text("value")),
            "global" => self.text.push_str(text("name")),
            "note" => self.text.push_str(text("text")),
            "truncated" => self.text.push('…'),
            "unreadable" => {
                self.text.push_str("unreadable: ");
                self.text.push_str(text("error"));
            }
            "complex" => {
                let part =
                    |field: &str| map.get(field).map_or_else(String::new, ToString::to_string);
                self.text.push_str(&format!("complex({}, {})", part("real"), part("imag")));
            }
            "bytes" => self.bytes("", text("hex"), ""),
            "bytearray" => self.bytes("bytearray(", text("hex"), ")"),
            "tuple" => match items("items").unwrap_or_default() {
                [one] => self.list("(", std::slice::from_ref(one), ",)"),
                all => self.list("(", all, ")"),
            },
            "set" => match items("items").unwrap_or_default() {
                [] => self.text.push_str("set()"),
                all => self.list("{", all, "}"),
            },
            "frozenset" => self.list("frozenset({", items("items").unwrap_or_default(), "})"),
            "dict" => {
                let pairs = items("entries").unwrap_or_default().iter().filter_map(Value::as_array);
                let pairs = pairs.filter_map(|pair| match &**pair {
                    [key, value] => Some((key.clone(), value)),
                    _ => None,
                });
                self.dict(pairs);
            }
            "tensor" | "numpy.ndarray" => {
                let shape = map.get("shape").map_or_else(String::new, ToString::to_string);
                let shape = shape.replace(',', ", ");
                self.text.push_str(&format!("{kind}({}, {shape})", text("dtype")));
            }
            _ if map.contains_key("dtype") && map.contains_key("shape") => {
                let shape = map.get("shape").map_or_else(String::new, ToString::to_string);
                let shape = shape.replace(',', ", ");
                self.text.push_str(&format!("{kind}({}, {shape})", text("dtype")));
            }
            _ => self.object(kind, map),
        }
    }

    fn bytes(&mut self, open: &str, hex: &str, close: &str) {
        self.text.push_str(open);
        self.text.push_str("b'");
        for byte in hex.as_bytes().chunks_exact(2) {
            let byte = str::from_utf8(byte).ok().and_then(|b| u8::from_str_radix(b, 16).ok());
            self.text.extend(byte.unwrap_or(b'?').escape_ascii().map(char::from));
            if self.is_full() {
                self.text.push('…');
                return;
            }
        }
        self.text.push('\'');
        self.text.push_str(close);
    }

    /// `module.Class(args…, field=…)`.
    fn object(&mut self, class: &str, map: &Map<String, Value>) {
        self.text.push_str(class);
        self.text.push('(');
        let mut separator = "";
        let args = map.get("args").and_then(Value::as_array);
        for arg in args.into_iter().flatten().chain(map.get("value")) {
            self.text.push_str(separator);
            self.value(arg);
            separator = ", ";
        }
        match map.get("state") {
            Some(Value::Object(state)) if !state.contains_key("type") => {
                for (field, value) in state {
                    if self.is_full() {
                        break;
                    }
                    self.text.push_str(separator);
                    self.text.push_str(field);
                    self.text.push('=');
                    self.value(value);
                    separator = ", ";
                }
            }
            Some(state) => {
                self.text.push_str(separator);
                self.value(state);
                separator = ", ";
            }
            None => {}
        }
        for part in ["items", "entries"] {
            if let Some(value) = map.get(part) {
                self.text.push_str(separator);
                self.value(value);
                separator = ", ";
            }
        }
        self.text.push(')');
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_look_like_pythons() {
        let cases = [
            (json!(null), "None"),
            (json!([true, 1, 1.0, "it's"]), "[True, 1, 1.0, 'it\\'s']"),
            (json!({ "lr": 0.1 }), "{'lr': 0.1}"),
            (json!({ "type": "tuple", "items": [0.9, 0.999] }), "(0.9, 0.999)"),
            (json!({ "type": "tuple", "items": [1] }), "(1,)"),
            (json!({ "type": "set", "items": [] }), "set()"),
            (json!({ "type": "float", "value": "nan" }), "nan"),
            (json!({ "type": "bytes", "hex": "00ff61" }), "b'\\x00\\xffa'"),
            (json!({ "type": "dict", "entries": [[1, "x"]] }), "{1: 'x'}"),
            (
                json!({ "type": "tensor", "dtype": "int64", "shape": [2, 3], "values": [] }),
                "tensor(int64, [2, 3])",
            ),
            (json!({ "type": "numpy.float32", "value": 2.5 }), "numpy.float32(2.5)"),
            (json!({ "type": "a.B", "args": [1], "state": { "x": 2 } }), "a.B(1, x=2)"),
        ];
        for (value, expected) in cases {
            assert_eq!(python(&value, 1000), expected);
        }
    }

    #[test]
    fn long_values_end_soon() {
        let long = json!(vec![vec!["abc"; 1000]; 1000]);
        let text = python(&long, 50);
        assert!(text.len() < 80 && text.contains('…'), "{text}");
        assert!(python(&json!("x".repeat(1000)), 50).len() < 80);
    }
}
