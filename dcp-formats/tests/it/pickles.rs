//! The pickle machine against CPython's pickles, and against hostile ones.

use std::sync::Arc;

use crate::support::tagged::tagged;
use dcp_core::Value;
use dcp_core::value::{BigInt, Dict, Global, MadeBy, Object};
use dcp_formats::pickle::{Converted, Converter, Limits, Node, Pickle, dump};
use proptest::prelude::*;

fn convert(bytes: &[u8]) -> Converted {
    let pickle = Pickle::parse(bytes, &Limits::DEFAULT).unwrap();
    Converter::new(&pickle, &Limits::DEFAULT, &mut ()).convert(pickle.root()).unwrap()
}

fn problem(bytes: &[u8]) -> String {
    Pickle::parse(bytes, &Limits::DEFAULT).unwrap_err().to_string()
}

struct Vector {
    name: String,
    protocol: u8,
    bytes: Vec<u8>,
    json: Option<serde_json::Value>,
}

fn vectors() -> Vec<Vector> {
    let parse = |line: &str| {
        let mut fields = line.splitn(4, ' ');
        let mut next = || fields.next().unwrap();
        let (name, protocol, hex) = (next().to_owned(), next().parse().unwrap(), next());
        let bytes =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
        Vector { name, protocol, bytes: bytes.collect(), json: serde_json::from_str(next()).ok() }
    };
    let vectors: Vec<_> = include_str!("../vectors/pickle.txt").lines().map(parse).collect();
    assert!(vectors.len() > 150, "{}", vectors.len());
    vectors
}

#[test]
fn all_protocols_of_cpython_are_read() {
    for vector in vectors() {
        let converted = convert(&vector.bytes);
        let (name, protocol) = (&vector.name, vector.protocol);
        if let Some(json) = &vector.json {
            assert_eq!(tagged(&converted.value), *json, "{name} {protocol}");
        }
        let typed = name.contains("ordered") || name == "range";
        assert_eq!(converted.faithful, !typed, "{name} {protocol}");
    }
}

#[test]
fn f11_protocol_2_is_written_byte_for_byte() {
    let mut written = 0;
    for vector in vectors().into_iter().filter(|vector| vector.protocol == 2) {
        let converted = convert(&vector.bytes);
        if converted.faithful {
            assert_eq!(dump(&converted.value).unwrap(), vector.bytes, "{}", vector.name);
            written += 1;
        }
    }
    assert!(written > 40, "{written}");
}

#[test]
fn names_are_noted_and_nothing_is_called() {
    let converted = convert(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.");
    assert!(!converted.faithful);
    let Value::Object(call) = converted.value else { panic!("{converted:?}") };
    assert!(call.class.is("os", "system"));
    assert_eq!(call.args[0].as_str(), Some("touch /tmp/pwned"));
    let instance = convert(b"(i__main__\nThing\np0\n(dp1\nS'a'\nI1\nsb.");
    let Value::Object(thing) = instance.value else { panic!("{instance:?}") };
    assert!(matches!(thing.state, Some(Value::Dict(state)) if state.get("a").is_some()));
    let old = convert(b"(c__main__\nThing\nK\x01o.");
    assert!(matches!(&old.value, Value::Object(thing) if thing.args.len() == 1));
    // NEWOBJ_EX keeps its keyword arguments behind the others.
    let with = convert(b"c__main__\nThing\nK\x01\x85}X\x01\0\0\0aNs\x92.");
    assert!(matches!(&with.value, Value::Object(thing) if thing.args.len() == 2));
}

#[test]
fn a_dict_subclass_with_state_stays_an_object() {
    let bare = b"ccollections\nOrderedDict\n)RX\x01\0\0\0aK\x01s.";
    assert!(matches!(convert(bare).value, Value::Dict(dict) if dict.len() == 1));
    let with_state = b"ccollections\nOrderedDict\n)RX\x01\0\0\0aK\x01s}X\x09\0\0\0_metadataNsb.";
    let Value::Object(object) = convert(with_state).value else { panic!() };
    assert_eq!((object.entries.len(), object.state.is_some()), (1, true));
}

#[test]
fn memos_precede_contents_and_sharing_is_seen() {
    // A list that holds itself, and one that occurs twice.
    let cycle = convert(b"]q\x00h\x00a.");
    assert!(!cycle.faithful);
    assert!(matches!(&cycle.value, Value::List(items) if items.len() == 1));
    let shared = convert(b"](]q\x00h\x00K\x05ae.");
    assert!(!shared.faithful);
    assert_eq!(
        tagged(&shared.value),
        serde_json::json!({"t": "list", "v": [{"t": "list", "v": [5]}, {"t": "list", "v": [5]}]})
    );
    // Immutable ones may be shared.
    assert!(convert(b"](K\x01\x85q\x00h\x00e.").faithful);
    // A tuple in a cycle, as CPython writes it.
    assert!(!convert(b"]q\x00h\x00\x85q\x01ah\x00.").faithful);
}

#[test]
fn strings_keep_their_identity() {
    let Value::List(items) = convert(b"](X\x02\0\0\0abq\x00h\x00X\x02\0\0\0abe.").value else {
        panic!()
    };
    let arcs: Vec<_> = items
        .iter()
        .map(|item| match item {
            Value::Str(text) => Arc::clone(text),
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(Arc::ptr_eq(&arcs[0], &arcs[1]));
    assert!(!Arc::ptr_eq(&arcs[0], &arcs[2]));
}

#[test]
fn lone_surrogates_are_shown_but_not_written() {
    let converted = convert(b"X\x04\0\0\0a\xed\xa0\xbd.");
    assert!(!converted.faithful);
    assert_eq!(converted.value.as_str(), Some("a\\ud83d"));
    let both = convert(b"X\x0a\0\0\0\xed\xb0\x80\xc3\xa4\xed\xbf\xbf\xc3\xa4.");
    assert_eq!(both.value.as_str(), Some("\\udc00\u{e4}\\udfff\u{e4}"));
    assert!(problem(b"X\x02\0\0\0a\xff.").contains("UTF-8"));
}

#[test]
fn a_million_levels_neither_overflow_nor_are_converted() {
    const LEVELS: usize = 1_000_000;
    for (open, close) in [(&b"]"[..], &b"a"[..]), (b"", b"\x85"), (b"}N", b"s")] {
        let mut bytes = open.repeat(LEVELS);
        bytes.extend(b"N");
        bytes.extend(close.repeat(LEVELS));
        bytes.push(b'.');
        let converted = convert(&bytes);
        assert!(!converted.faithful);
    }
    // Objects whose state, arguments and class are objects.
    for close in [&b"b"[..], b"\x85R"] {
        let mut bytes = b"cm\nC\n)R".repeat(if close == b"b" { LEVELS / 10 } else { 0 });
        bytes.extend(b"cm\nC\nq\x00N".repeat(if close == b"b" { 0 } else { LEVELS / 10 }));
        bytes.extend(b"N");
        bytes.extend(close.repeat(LEVELS / 10));
        bytes.push(b'.');
        let _ = Pickle::parse(&bytes, &Limits::DEFAULT).map(|pickle| {
            Converter::new(&pickle, &Limits::DEFAULT, &mut ()).convert(pickle.root()).unwrap()
        });
    }
    let deep = (0..1000).fold(Value::None, |inner, _| Value::List(vec![inner]));
    assert!(dump(&deep).unwrap_err().problem().contains("deeply"));
}

#[test]
fn bombs_of_shared_containers_stay_small() {
    // Each of 100 lists holds the one before it ten times.
    for opener in [&b"]"[..], b""] {
        let mut bytes = b"]q\x00".to_vec();
        for level in 0..100_u8 {
            bytes.extend(opener);
            bytes.push(b'(');
            for _ in 0..10 {
                bytes.extend([b'h', level]);
            }
            bytes.extend(if opener.is_empty() { &b"t"[..] } else { b"e" });
            bytes.extend([b'q', level + 1]);
        }
        bytes.push(b'.');
        let converted = convert(&bytes);
        assert!(!converted.faithful);
    }
    // Large bytes that are referred to often are not copied.
    let mut bytes = b"](c_codecs\nencode\nX\0\0\x01\0".to_vec();
    bytes.extend(vec![b'x'; 1 << 16]);
    bytes.extend(b"X\x06\0\0\0latin1\x86Rq\x00");
    bytes.extend(b"h\x00".repeat(100_000));
    bytes.extend(b"e.");
    let Value::List(items) = convert(&bytes).value else { panic!() };
    let (Value::Bytes(first), Value::Bytes(last)) = (&items[0], &items[100_000]) else { panic!() };
    assert_eq!(first.as_ptr(), last.as_ptr());
}

#[test]
fn claims_are_compared_with_what_is_there() {
    for claim in [
        &b"X\xff\xff\xff\x7fab"[..],
        b"\x8d\0\0\0\0\0\0\0\x10ab",
        b"\x8e\0\0\0\0\0\0\0\x10ab",
        b"\x96\0\0\0\0\0\0\0\x10ab",
        b"\x95\0\0\0\0\0\0\0\x10ab",
        b"\x8b\xff\xff\xff\xffab",
        b"T\xff\xff\xff\x7fab",
        b"B\xff\xff\xff\xffab",
        b"C\xffab",
    ] {
        let problem = problem(claim);
        assert!(problem.contains("claimed") || problem.contains("frame"), "{problem}");
        assert!(problem.contains("at byte 0"), "{problem}");
    }
    assert!(problem(b"Nr\xff\xff\xff\xff.").contains("memo"));
    assert!(problem(b"Np99999999999999999999999\n.").contains("memo"));
}

#[test]
fn misuse_of_the_stack_is_an_error() {
    for (bytes, expected) in [
        (&b""[..], "ends early"),
        (b"N", "ends early"),
        (b".", "stack is empty"),
        (b"(.", "stack is empty"),
        (b"N(0.", ""),
        (b"a.", "stack is empty"),
        (b"Na.", "stack is empty"),
        (b"NNa.", "not a list"),
        (b"e.", "no mark"),
        (b"](e.", ""),
        (b"}(Nu.", "without a value"),
        (b"(Nd.", "without a value"),
        (b"NNR.", "tuple"),
        (b"NNb.", "without state"),
        (b"cm\nC\n)RNbNb.", "twice"),
        (b"h\x00.", "not set"),
        (b"q\x00.", "stack is empty"),
        (b"\x94.", "stack is empty"),
        (b"NN\x93.", "not a string"),
        (b"(o.", "without a class"),
        (b"\x82\x01.", "extension"),
        (b"\x97.", "outside"),
        (b"N\x98.", "outside"),
        (b"\x80\x06N.", "protocol 6"),
        (b"\xff.", "0xff"),
        (b"Iabc\n.", "integer"),
        (b"Fabc\n.", "float"),
        (b"Sabc\n.", "quoted"),
        (b"I1", "line"),
        (b"cm\xff\nC\n.", "UTF-8"),
    ] {
        match Pickle::parse(bytes, &Limits::DEFAULT) {
            Ok(_) => assert_eq!(expected, "", "{bytes:?}"),
            Err(error) => assert!(error.problem().contains(expected), "{bytes:?}: {error}"),
        }
    }
}

#[test]
fn what_follows_stop_is_not_looked_at() {
    let pickle = Pickle::parse(b"\x80\x02K\x05.garbage", &Limits::DEFAULT).unwrap();
    assert_eq!((pickle.byte_len(), pickle.protocol()), (5, 2));
    assert!(matches!(pickle.node(pickle.root()), Node::Int(5)));
}

#[test]
fn keys_that_hash_badly_do_not_make_a_dict() {
    let converted = convert(b"}(]N]Nu.");
    let Value::Object(dict) = converted.value else { panic!() };
    assert!(dict.class.is("builtins", "dict") && dict.entries.len() == 2 && !converted.faithful);
    // Neither do many tuples as keys take quadratic time.
    let mut bytes = b"}(".to_vec();
    for n in 0..100_000_u32 {
        bytes.extend(b"J");
        bytes.extend(n.to_le_bytes());
        bytes.extend(b"K\x01\x86N");
    }
    bytes.extend(b"u.");
    assert!(matches!(convert(&bytes).value, Value::Dict(dict) if dict.len() == 100_000));
}

#[test]
fn objects_are_written_as_python_wrote_them() {
    // What Python's pickle.dumps(.., 2) makes of pathlib.PurePosixPath("/a/b"),
    // signal.SIGTERM, io.BytesIO(b"ab"), deque([1]), deque([1, 2], 5), a defaultdict(list), an
    // instance of a class in a class, an instance of one without state, and names of classes.
    let samples: [&[u8]; 9] = [
        b"\x80\x02cpathlib\nPurePosixPath\nq\x00X\x01\x00\x00\x00/q\x01X\x01\x00\x00\x00aq\x02\
          X\x01\x00\x00\x00bq\x03\x87q\x04Rq\x05.",
        b"\x80\x02csignal\nSignals\nq\x00K\x0f\x85q\x01Rq\x02.",
        b"\x80\x02c_io\nBytesIO\nq\x00)\x81q\x01c_codecs\nencode\nq\x02X\x02\x00\x00\x00abq\x03\
          X\x06\x00\x00\x00latin1q\x04\x86q\x05Rq\x06K\x00N\x87q\x07b.",
        b"\x80\x02ccollections\ndeque\nq\x00)Rq\x01K\x01a.",
        b"\x80\x02ccollections\ndeque\nq\x00)K\x05\x86q\x01Rq\x02(K\x01K\x02e.",
        b"\x80\x02ccollections\ndefaultdict\nq\x00c__builtin__\nlist\nq\x01\x85q\x02Rq\x03\
          X\x01\x00\x00\x00kq\x04K\x01s.",
        b"\x80\x02c__builtin__\ngetattr\nq\x00cm\nO\nq\x01X\x01\x00\x00\x00Eq\x02\x86q\x03Rq\x04)\
          \x81q\x05}q\x06X\x01\x00\x00\x00xq\x07K\x01sb.",
        b"\x80\x02cm\nC\nq\x00)\x81q\x01.",
        b"\x80\x02]q\x00(c__builtin__\ndict\nq\x01ccollections\nOrderedDict\nq\x02e.",
    ];
    for sample in samples {
        let value = convert(sample).value;
        let written = dump(&value).unwrap();
        assert_eq!(written.escape_ascii().to_string(), sample.escape_ascii().to_string());
        let wire = Value::from_wire(&value.to_wire().unwrap()).unwrap();
        assert_eq!(dump(&wire).unwrap(), written);
    }
    // Protocol 4: m.K.__new__(m.K, 1, k=2), and 1001 items and entries of subclasses.
    let mut many = b"\x80\x04cm\nL\n)R(".to_vec();
    many.extend(b"K\x01".repeat(1001));
    many.extend(b"ecm\nD\n)R(");
    (0..1001_u16).for_each(|n| many.extend([&b"M"[..], &n.to_le_bytes(), b"N"].concat()));
    many.extend(b"u\x86.");
    for sample in [&b"\x80\x04cm\nK\nK\x01\x85}X\x01\x00\x00\x00kK\x02s\x92."[..], &many] {
        let value = convert(sample).value;
        let again = convert(&dump(&value).unwrap()).value;
        assert!(again.same(&value), "{again:?}");
    }
}

#[test]
fn what_was_only_shown_is_not_written() {
    let mut shown = Object::new(Global::new("m", "C"), vec![]);
    shown.made_by = MadeBy::Unknown;
    let mut keywords = Object::new(Global::new("m", "C"), vec![]);
    keywords.made_by = MadeBy::NewWithKeywords;
    let called = Object::new(Global::new("", "<call>"), vec![]);
    for object in [shown, keywords, called, Object::new(Global::new("", "<cycle>"), vec![])] {
        let error = dump(&Value::List(vec![object.clone().into()])).unwrap_err();
        assert!(error.problem().contains(&*object.class.name), "{error}");
    }
    // A list in itself, something persistent, and names that would be opcodes.
    for pickle in [&b"\x80\x02]q\x00h\x00a."[..], b"\x80\x02K\x01Q."] {
        dump(&convert(pickle).value).unwrap_err();
    }
    for name in [Global::new("m\nC\n.", "C"), Global::new("m", "C\n.")] {
        let object = Object::new(name.clone(), vec![]);
        for value in [Value::Global(name), Value::from(object)] {
            let error = dump(&value).unwrap_err();
            assert!(error.problem().contains("line break"), "{error}");
        }
    }
}

#[test]
fn a_namespace_is_nothing_but_its_attributes() {
    let mut object = Object::new(Global::new("argparse", "Namespace"), vec![]);
    object.state = Some(Value::Dict([("lr", 0.5)].into()));
    let bytes = dump(&Value::from(object.clone())).unwrap();
    // As Python's pickle.dumps(argparse.Namespace(lr=0.5), 2) is.
    let expected = b"\x80\x02cargparse\nNamespace\nq\x00)\x81q\x01}q\x02X\x02\x00\x00\x00lrq\x03\
        G?\xe0\x00\x00\x00\x00\x00\x00sb.";
    assert_eq!(bytes, &expected[..]);
    object.made_by = MadeBy::New;
    assert!(convert(&bytes).value.same(&Value::from(object)));
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        proptest::collection::vec(any::<u8>(), 9..300).prop_map(|bytes| {
            let big = BigInt::from_le_bytes(bytes);
            big.to_i64().map_or(Value::BigInt(big), Value::Int)
        }),
        any::<f64>().prop_map(Value::Float),
        (any::<f64>(), any::<f64>()).prop_map(|(re, im)| Value::Complex(re, im)),
        any::<String>().prop_map(Value::from),
        proptest::collection::vec(any::<u8>(), 0..20).prop_map(|b| Value::Bytes(b.into())),
        proptest::collection::vec(any::<u8>(), 0..20).prop_map(|b| Value::ByteArray(b.into())),
    ];
    leaf.prop_recursive(4, 64, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..8).prop_map(Value::List),
            proptest::collection::vec(inner.clone(), 0..8).prop_map(Value::Tuple),
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::Set),
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::FrozenSet),
            proptest::collection::vec((any::<String>(), inner), 0..8)
                .prop_map(|entries| Value::Dict(entries.into_iter().collect::<Dict>())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn values_survive_a_round_trip(value in value()) {
        let bytes = dump(&value).unwrap();
        let again = convert(&bytes);
        prop_assert!(again.faithful);
        prop_assert!(value.same(&again.value), "{value:?} {:?}", again.value);
        prop_assert_eq!(dump(&again.value).unwrap(), bytes);
    }

    #[test]
    fn random_opcodes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(pickle) = Pickle::parse(&bytes, &Limits::DEFAULT) {
            let _ = Converter::new(&pickle, &Limits::DEFAULT, &mut ()).convert(pickle.root());
        }
    }
}
