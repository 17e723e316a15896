//! Objects in `inspect --json` against the values that PyTorch saved.

use serde_json::{Map, Value, json};

use crate::support::{all_fixtures, dcp, expected};

/// What we print for a value that `expected.json` describes, or `None` where the two say
/// different things about it (what the fixture shows is one class's view of it).
fn ours(value: &Value) -> Option<Value> {
    let Some(tagged) = value.as_object() else { return Some(value.clone()) };
    let all = |field: &str| -> Option<Vec<Value>> {
        tagged[field].as_array()?.iter().map(ours).collect()
    };
    let text = |field: &str| tagged.get(field).and_then(Value::as_str);
    let number = |text: &str| match text {
        "nan" | "inf" | "-inf" => json!({ "type": "float", "value": text }),
        finite => json!(finite.parse::<f64>().unwrap()),
    };
    Some(match text("t")? {
        "int" => match text("v")?.parse::<i64>() {
            Ok(n) if n.unsigned_abs() <= 1 << 53 => json!(n),
            _ => json!({ "type": "int", "value": text("v")? }),
        },
        "float" => number(text("v")?),
        "complex" => {
            json!({ "type": "complex", "real": number(text("re")?), "imag": number(text("im")?) })
        }
        kind @ ("bytes" | "bytearray") => json!({ "type": kind, "hex": text("hex")? }),
        "list" => json!(all("v")?),
        kind @ ("tuple" | "set" | "frozenset") => json!({ "type": kind, "items": all("v")? }),
        "dict" => {
            let mut plain = Map::new();
            for pair in tagged["v"].as_array()? {
                plain.insert(pair[0].as_str()?.to_owned(), ours(&pair[1])?);
            }
            Value::Object(plain)
        }
        _ => return None,
    })
}

#[test]
fn objects_are_what_was_saved() {
    let mut compared = 0;
    for fixture in all_fixtures() {
        let found = dcp(["inspect", &fixture, "--json"]).json();
        for (name, value) in expected(&fixture)["objects"].as_object().unwrap() {
            let Some(wanted) = ours(value) else { continue };
            let key = &found["keys"][name];
            assert_eq!(key["kind"], "object", "{fixture} {name}");
            assert_eq!(key["value"], wanted, "{fixture} {name}");
            compared += 1;
        }
    }
    assert!(compared > 150, "only {compared} objects were compared");
}

#[test]
fn what_has_no_plain_form_is_tagged() {
    let found = dcp(["inspect", "objects", "--json"]).json();
    let value = |name: &str| found["keys"][name]["value"].clone();
    assert_eq!(value("np_scalar"), json!({ "type": "numpy.float32", "value": 2.5 }));
    assert_eq!(
        value("np_array"),
        json!({
            "type": "numpy.ndarray", "dtype": "int32", "shape": [2, 3],
            "values": [0, 1, 2, 3, 4, 5]
        })
    );
    assert_eq!(value("np_f")["order"], "F");
    assert_eq!(
        value("namespace"),
        json!({ "type": "argparse.Namespace", "state": { "lr": 0.1, "name": "x", "sub": [1, 2] } })
    );
    assert_eq!(value("dtype"), json!({ "type": "global", "name": "torch.bfloat16" }));
    assert_eq!(value("tuple_with_tensor")["items"][0]["values"], json!([0, 1, 2]));
}

#[test]
fn get_prints_objects_too() {
    let get = |name: &str| dcp(["get", "objects", name]).ok();
    assert_eq!(get("tuple"), "(1, 'a', None)\n");
    assert_eq!(get("nan"), "nan\n");
    assert_eq!(get("bytes"), "b'\\x00\\xffabc'\n");
    let json = dcp(["get", "objects", "nested_list", "--json"]).json();
    assert_eq!(json, json!({ "kind": "object", "value": [[1, 2], [3, [4]]] }));
}
