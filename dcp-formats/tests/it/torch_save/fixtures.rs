//! Files that real PyTorch wrote, with all that training code leaves in them.

use dcp_core::metadata::{Entry, Layout};
use dcp_core::path::PathItem;
use dcp_core::{DType, Value};
use serde_json::{Map, Value as Json, json};

use crate::harness::Loaded;
use crate::support::{self, tagged::tagged};
use crate::torch_save::reading::{fixture, load, metadata, root, stored};

/// Every file whose expected content is known: fixture, file.
const FILES: &[(&str, &str)] = &[
    ("t215", "zip.pt"),
    ("t215", "legacy.pt"),
    ("t215", "zip_nobyteorder.pt"),
    ("t215", "zip_proto4.pt"),
    ("t215", "zip_stream.pt"),
    ("t21", "zip.pt"),
    ("t21", "legacy.pt"),
    ("t21", "zip_nobyteorder.pt"),
    ("t21", "zip_proto4.pt"),
    ("t21", "zip_stream.pt"),
    ("experimental", "checkpoint_0.pt"),
    ("kinds", "zip.pt"),
    ("kinds", "legacy.pt"),
    ("kinds", "zip_proto5.pt"),
];

/// Compares tensors and objects with what PyTorch flattened.
pub(crate) fn compare(name: &str, loaded: &Loaded, which: impl Fn(&str) -> bool) {
    let expected = support::json(&root().join(name).join("expected.json"));
    let tensors = support::tensors_of(&root().join(name).join("expected.safetensors"));
    for (fqn, tensor) in expected["tensors"].as_object().unwrap() {
        let found = &loaded.tensors.get(fqn).unwrap_or_else(|| panic!("{name}: no {fqn}"));
        assert_eq!(found.dtype().name(), tensor["dtype"], "{name}: {fqn}");
        assert_eq!(found.shape().to_vec(), support::uints(&tensor["shape"]), "{name}: {fqn}");
        assert_eq!(found.to_vec().unwrap(), tensors[fqn].1, "{name}: {fqn}");
    }
    for (fqn, object) in expected["objects"].as_object().unwrap().iter().filter(|o| which(o.0)) {
        // The expectation of PyTorch 2.1 follows its own, older rule.
        if name.starts_with("t21") && fqn == "optim.param_groups" {
            continue;
        }
        let found = loaded.objects.get(fqn).unwrap_or_else(|| panic!("{name}: no {fqn}"));
        assert_eq!(plain(&tagged(found)), plain(object), "{name}: {fqn}");
    }
}

/// Floats by their bits, whatever `repr` wrote them; `torch.Size` as the tuple that it is.
fn plain(json: &Json) -> Json {
    match json {
        Json::Object(fields) if fields.get("t").is_some_and(|tag| tag == "float") => {
            json!(fields["v"].as_str().unwrap().parse::<f64>().unwrap().to_bits())
        }
        Json::Object(fields) if fields.get("t").is_some_and(|tag| tag == "torch.Size") => {
            json!({ "t": "tuple", "v": plain(&fields["v"]) })
        }
        Json::Object(fields) => {
            fields.iter().map(|(k, v)| (k.clone(), plain(v))).collect::<Map<_, _>>().into()
        }
        Json::Array(items) => items.iter().map(plain).collect(),
        other => other.clone(),
    }
}

#[test]
fn every_file_holds_what_pytorch_saved() {
    for (name, file) in FILES {
        let loaded = load(&fixture(name, file)).unwrap_or_else(|e| panic!("{name}/{file}: {e:?}"));
        let proto5 = file.ends_with("proto5.pt");
        // NumPy pickles arrays in another way there.
        compare(name, &loaded, |fqn| {
            !(proto5 && matches!(fqn, "rng.numpy" | "np.arr" | "np.dtype_arr"))
        });
        let metadata = metadata(&fixture(name, file)).unwrap();
        let expected = support::json(&root().join(name).join("expected.json"));
        let paths = expected["flatten_mapping"].as_object().unwrap();
        for (fqn, path) in paths.iter().filter(|_| !name.starts_with("t21")) {
            let found = metadata.get(fqn).unwrap().path().unwrap();
            let found: Vec<Json> = found
                .iter()
                .map(|step| match step {
                    PathItem::Key(key) => json!(&**key),
                    PathItem::Index(index) => json!({ "i": index }),
                })
                .collect();
            assert_eq!(json!(found), *path, "{name}: {fqn}");
        }
        if !matches!(*name, "kinds" | "t21") {
            assert_eq!(metadata.len(), paths.len(), "{name}/{file}");
        }
    }
}

#[test]
fn what_no_tensor_can_be_made_of_is_an_object_by_name() {
    for file in ["zip.pt", "legacy.pt", "zip_proto5.pt"] {
        let loaded = load(&fixture("kinds", file)).unwrap();
        let class = |fqn: &str| {
            let Value::Opaque(opaque) = &loaded.objects[fqn] else { panic!("{fqn}") };
            let Value::Object(object) = &opaque.view else { panic!("{fqn}: {:?}", opaque.view) };
            object.class.to_string()
        };
        assert_eq!(class("args"), "__main__.TrainArgs");
        assert_eq!(class("ns"), "argparse.Namespace");
        assert_eq!(class("phase"), "__main__.Phase");
        assert_eq!(class("sparse"), "torch._utils._rebuild_sparse_tensor");
        assert_eq!(class("meta"), "torch._utils._rebuild_meta_tensor_no_storage");
        assert_eq!(class("np.f"), "numpy._core.multiarray.scalar");
        assert_eq!(class("device"), "torch.device");
        let Value::Opaque(shared) = &loaded.objects["shared"] else { panic!() };
        assert_eq!(shared.view.kind(), "list");
        // A quantized tensor means nothing without its scale.
        assert_eq!(class("q"), "torch._utils._rebuild_qtensor");
        let Value::Opaque(q) = &loaded.objects["q"] else { panic!() };
        let Value::Object(q) = &q.view else { panic!() };
        let [Value::Tensor(stored), Value::Tuple(how)] = &*q.args else { panic!("{q:?}") };
        let elements = (stored.dtype(), stored.to_vec().unwrap());
        assert_eq!(elements, (DType::QInt8, vec![1, 3, 5, 7]));
        assert_eq!(how[1].as_float(), Some(0.5));
    }
}

#[test]
fn tied_tensors_and_views_lie_in_the_same_bytes() {
    let metadata = metadata(&fixture("kinds", "zip.pt")).unwrap();
    let place = |fqn: &str| {
        let Some(Entry::Tensor(tensor)) = metadata.get(fqn) else { panic!("{fqn}") };
        let placement = tensor.chunks.get(0).unwrap().placement.unwrap();
        (placement, metadata.encoding(&placement).unwrap().layout)
    };
    assert_eq!(place("tied.a"), place("tied.b"));
    assert_eq!(place("tied.a"), place("tied.c"));
    assert_eq!(place("tied.a").1, Layout::Raw);
    let (base, back) = (place("views.t").0, place("views.back"));
    assert_eq!((back.0.byte_offset, back.0.byte_len), (base.byte_offset + 48, 48));
    assert_eq!((place("views.t").1, back.1), (Layout::TorchSave, Layout::Raw));
}

#[test]
fn an_object_that_is_no_dict_gets_a_name() {
    let tensor = load(&fixture("kinds", "root_tensor.pt")).unwrap();
    assert_eq!(tensor.tensors.keys().collect::<Vec<_>>(), ["value"]);
    let list = load(&fixture("kinds", "root_list.pt")).unwrap();
    assert!(list.objects["value.0"].same(&Value::Int(1)));
    assert_eq!(list.tensors["value.1"].shape().to_vec(), [2]);
}

#[test]
fn the_state_of_olmo_cores_trainer_is_readable() {
    let file = root().join("olmo_trainer/rank0.pt");
    let loaded = load(&stored(std::fs::read(file).unwrap())).unwrap();
    assert!(loaded.objects["global_step"].same(&Value::Int(6)), "{:?}", loaded.objects.keys());
}
