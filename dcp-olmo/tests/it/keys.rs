//! `load_keys`, beside what OLMo-core does (and where it fails).

use std::sync::Arc;

use dcp_conformance::{CountingStorage, WebStorage};
use dcp_core::{Storage, Value};
use dcp_olmo::load_keys;
use futures_util::{StreamExt, TryStreamExt};

use crate::support::{ANY, FLAT, NESTED, block_on, fixture, key, reader, states};

fn load(storage: &Arc<dyn Storage>, keys: &[&str]) -> Vec<(String, Value)> {
    block_on(async {
        let values = load_keys(reader(storage), keys.iter().copied()).await.unwrap();
        values.try_collect().await.unwrap()
    })
}

fn value(storage: &Arc<dyn Storage>, key: &str) -> Value {
    load(storage, &[key]).remove(0).1
}

fn keys(value: &Value) -> Vec<String> {
    let dict = value.as_dict().unwrap_or_else(|| panic!("{value:?}"));
    dict.iter().map(|(key, _)| key.as_str().unwrap().to_owned()).collect()
}

#[test]
fn in_the_order_asked_as_often_as_asked() {
    let storage = fixture(NESTED);
    let requested = ["model.tiny", "model.embeddings.weight", "model", "model.tiny", "model"];
    let values = load(&storage, &requested);
    assert!(values.iter().map(|(key, _)| key).eq(requested.iter()));
    let tiny = values[0].1.as_tensor().unwrap();
    assert_eq!(tiny.shape().to_vec(), [3, 5]);
    assert!(values[3].1.same(&values[0].1) && values[4].1.same(&values[2].1));
    assert!(values[2].1.as_dict().unwrap().get("tiny").unwrap().same(&values[0].1));
    assert_eq!(values[2].1.as_dict().unwrap().len(), 14);
}

#[test]
fn parts_of_names_in_both_layouts() {
    for file in [NESTED, FLAT] {
        let storage = fixture(file);
        let blocks = value(&storage, "model.blocks.0");
        assert_eq!(
            keys(&blocks),
            ["norm.weight", "norm.bias", "w1.weight", "w2.weight", "w2.bias"]
        );
        let state = value(&storage, "optim.state.tiny");
        assert_eq!(keys(&state), ["step", "exp_avg", "exp_avg_sq"]);
    }
    let nested = value(&fixture(NESTED), "optim.param_groups");
    let Value::List(groups) = nested else { panic!("{nested:?}") };
    assert_eq!(groups.len(), 2);
    let lr = value(&fixture(FLAT), "optim.param_groups.tiny.lr");
    assert_eq!(lr.view().as_float(), Some(0.001));
}

#[test]
fn lists_have_indices() {
    let storage = fixture(NESTED);
    let lr = value(&storage, "optim.param_groups.0.lr");
    assert_eq!(lr.view().as_float(), Some(0.001));
    let name = value(&storage, "optim.param_groups.0.params.1");
    assert_eq!(name.as_str(), Some("embeddings.weight"));
    let beta = value(&storage, "optim.param_groups.1.betas.1");
    assert_eq!(beta.as_float(), Some(0.999));
    let group = value(&storage, "optim.param_groups.1");
    assert!(keys(&group).contains(&"params".to_owned()));
    let any = fixture(ANY);
    assert_eq!(keys(&value(&any, "extra.nested.list.2")), ["a"]);
    assert_eq!(value(&any, "extra.nested.list.1").view().as_int(), Some(2));
    assert_eq!(value(&any, "extra.tuple.1").as_str(), Some("x"));
    assert_eq!(value(&any, "model.with/slash").as_tensor().unwrap().shape().to_vec(), [2]);
}

#[test]
fn globs_give_a_dict_by_name() {
    let storage = fixture(NESTED);
    let weights = value(&storage, "model.*.w1.weight");
    assert_eq!(keys(&weights), ["model.blocks.0.w1.weight", "model.blocks.1.w1.weight"]);
    assert_eq!(keys(&value(&storage, "model.blocks.?.w2.bias")).len(), 2);
    let (model, _) = states(&storage);
    let weight = weights.as_dict().unwrap().get("model.blocks.0.w1.weight").unwrap();
    assert!(weight.same(model.get("blocks.0.w1.weight").unwrap()));
}

#[test]
fn what_is_not_there_is_named_in_full_and_nothing_is_read() {
    let counting = CountingStorage::new(fixture(NESTED));
    let storage: Arc<dyn Storage> = Arc::new(counting.clone());
    let fail = |keys: &[&str]| {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        match block_on(load_keys(reader(&storage), keys)) {
            Ok(_) => panic!("it was found"),
            Err(error) => error.to_string(),
        }
    };
    let error = fail(&["model.tiny", "model.nope", "model.blocks.7", "*.nothing"]);
    for name in ["model.nope", "model.blocks.7", "*.nothing"] {
        assert!(error.contains(&format!("{name:?}")), "{error}");
    }
    assert!(!error.contains("model.tiny"), "{error}");
    assert!(fail(&["model.tinny"]).contains("\"model.tinny\""));
    // The index, twice.
    let index = block_on(storage.stat(&key(".metadata"))).unwrap().byte_len;
    assert_eq!(counting.counts().bytes_read, 2 * index);

    let values = block_on(load_keys(reader(&storage), ["optim.param_groups.0.params.99"]));
    let error = block_on(values.unwrap().try_collect::<Vec<_>>()).unwrap_err();
    assert!(error.to_string().contains("optim.param_groups.0.params.99"), "{error}");
}

#[test]
fn a_value_is_read_when_its_turn_comes() {
    let counting = CountingStorage::new(fixture(NESTED));
    let storage: Arc<dyn Storage> = Arc::new(counting.clone());
    block_on(async {
        let reader = reader(&storage);
        let keys = ["model.tiny", "model.embeddings.weight"];
        let mut values = Box::pin(load_keys(reader, keys).await.unwrap());
        counting.reset();
        values.next().await.unwrap().unwrap();
        let first = counting.reset().bytes_read;
        assert!((60..4000).contains(&first), "{first}");
        values.next().await.unwrap().unwrap();
        assert!(counting.counts().bytes_read >= 33 * 12 * 4);
    });
}

#[test]
fn a_server_that_cannot_list_will_do() {
    for file in [NESTED, FLAT, ANY] {
        let web: Arc<dyn Storage> = Arc::new(WebStorage::new(fixture(file)));
        assert!(value(&web, "model").same(&value(&fixture(file), "model")), "{file}");
        block_on(dcp_olmo::get_checkpoint_metadata(&web)).unwrap();
    }
}
