//! Quantized weights, of PyTorch's tensors and of models, through every command that writes.

use std::fs;

use serde_json::{Value, json};

use crate::model_folder::{dtypes, weights};
use crate::support::{dcp, fixtures, path};

/// The elements mean nothing without the archive, which every command carries, compressed or not.
#[test]
fn quantized_tensors_stay_quantized_through_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let mixed = at("mixed");
    dcp(["merge", "quantized", "t21_plain", "--out", &mixed, "--to=dcp"]).ok();
    let commands: [(&str, &[&str]); 6] = [
        ("quantized", &["reshard", "quantized", "-n2", "--compress=zstd"]),
        ("quantized", &["convert", "quantized", "--to=dcp", "--compress=zstd:9"]),
        ("quantized", &["merge", "quantized", "quantized", "--identical", "--to=dcp"]),
        (&mixed, &["merge", "quantized", "t21_plain", "--to=dcp", "--compress=zstd"]),
        (&mixed, &["average", &mixed, &mixed, "--to=dcp"]),
        (&mixed, &["average", &mixed, &mixed, "--to=dcp", "--compress=zstd"]),
    ];
    let data = |place: &str| fs::read(fixtures().join(place).join("__0_0.distcp")).unwrap();
    for (number, (source, command)) in commands.into_iter().enumerate() {
        let (made, again) = (at(&format!("made{number}")), at(&format!("again{number}")));
        let out = match command[0] {
            "merge" | "average" => vec!["--out", &*made],
            _ => vec![&*made],
        };
        dcp(["-q"].iter().chain(command).copied().chain(out)).ok();
        dcp(["verify", "--deep", &made]).ok();
        dcp(["diff", source, &made]).ok();
        // What is made can be made into others, with the scales that it had.
        dcp(["reshard", &made, &again, "-n1"]).ok();
        dcp(["diff", source, &again]).ok();
        dcp(["verify", "--deep", &again]).ok();
        if command[0] == "convert" {
            assert!(data("quantized") == data(&again), "{command:?}");
        }
        let file = at(&format!("file{number}.pt"));
        dcp(["convert", &made, &file]).ok();
        let keys = &dcp(["inspect", &file, "--json"]).json()["keys"];
        let value = keys["qint8"]["value"].to_string();
        assert!(value.contains("torch.per_tensor_affine"), "{command:?}: {value}");
        dcp(["merge", source, &made, "--identical", "--out", &again, "--to=dcp", "--overwrite"])
            .ok();
    }
}

type Tensors = &'static [(&'static str, &'static str, usize, &'static [usize])];

/// Quantization methods of transformers that `--dequantize` does not read: the configuration, tensors
/// of a layer, and tensors next to them that a cast changes.
fn schemes() -> Vec<(&'static str, Value, Tensors, Tensors)> {
    let of = |config: Value| json!({ "quantization_config": config });
    let bias: Tensors = &[("q.bias", "F32", 4, &[8])];
    vec![
        (
            "compressed-tensors (pack-quantized)",
            of(json!({"quant_method": "compressed-tensors", "format": "pack-quantized"})),
            &[
                ("q.weight_packed", "I32", 4, &[8, 1]),
                ("q.weight_scale", "F32", 4, &[8, 1]),
                ("q.weight_shape", "I64", 8, &[2]),
            ],
            bias,
        ),
        (
            "compressed-tensors (nvfp4-pack-quantized)",
            of(json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})),
            &[
                ("q.weight_packed", "U8", 1, &[8, 4]),
                ("q.weight_scale", "F8_E4M3", 1, &[8, 1]),
                ("q.weight_global_scale", "F32", 4, &[1]),
                ("q.input_global_scale", "F32", 4, &[1]),
            ],
            bias,
        ),
        (
            "modelopt (NVFP4)",
            of(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"})),
            &[
                ("q.weight", "U8", 1, &[8, 4]),
                ("q.weight_scale", "F8_E4M3", 1, &[8, 1]),
                ("q.weight_scale_2", "F32", 4, &[]),
                ("q.input_scale", "F32", 4, &[]),
                ("attn.k_scale", "F32", 4, &[]),
                ("attn.v_scale", "F32", 4, &[]),
            ],
            bias,
        ),
        (
            "gptq",
            of(json!({"quant_method": "gptq", "bits": 4})),
            &[
                ("q.qweight", "I32", 4, &[4, 8]),
                ("q.qzeros", "I32", 4, &[1, 1]),
                ("q.scales", "F32", 4, &[1, 8]),
                ("q.g_idx", "I32", 4, &[32]),
            ],
            bias,
        ),
        (
            "awq",
            of(json!({"quant_method": "awq", "bits": 4})),
            &[
                ("q.qweight", "I32", 4, &[32, 1]),
                ("q.qzeros", "I32", 4, &[1, 1]),
                ("q.scales", "F32", 4, &[1, 8]),
            ],
            bias,
        ),
        (
            "bitsandbytes",
            of(json!({"quant_method": "bitsandbytes", "load_in_4bit": true})),
            &[
                ("q.weight", "BF16", 2, &[16, 1]),
                ("q.weight.absmax", "F32", 4, &[8]),
                ("q.weight.quant_map", "F32", 4, &[16]),
                ("q.weight.quant_state.bitsandbytes__nf4", "U8", 1, &[80]),
            ],
            bias,
        ),
        (
            "bitsandbytes",
            of(json!({"quant_method": "bitsandbytes", "load_in_8bit": true})),
            &[("q.weight", "I8", 1, &[8, 8]), ("q.SCB", "F32", 4, &[8])],
            bias,
        ),
        (
            "quanto",
            of(json!({"quant_method": "quanto"})),
            &[("q.weight._data", "I8", 1, &[8, 8]), ("q.weight._scale", "F32", 4, &[8, 1])],
            bias,
        ),
        (
            "hqq",
            of(json!({"quant_method": "hqq"})),
            &[
                ("q.W_q", "BF16", 2, &[16, 8]),
                ("q.scale", "F32", 4, &[16, 1]),
                ("q.zero", "F32", 4, &[16, 1]),
            ],
            bias,
        ),
        (
            "fbgemm_fp8",
            of(json!({"quant_method": "fbgemm_fp8"})),
            &[
                ("q.weight", "F8_E4M3", 1, &[8, 8]),
                ("q.weight_scale", "F32", 4, &[8, 1]),
                ("q.input_scale_ub", "F32", 4, &[1]),
            ],
            bias,
        ),
        (
            "aqlm",
            of(json!({"quant_method": "aqlm"})),
            &[
                ("q.codes", "I16", 2, &[8, 8, 1]),
                ("q.codebooks", "F32", 4, &[2, 16, 1, 8]),
                ("q.scales", "F32", 4, &[8, 1, 1, 1]),
            ],
            bias,
        ),
    ]
}

#[test]
fn a_scheme_that_is_not_read_is_refused_by_name_and_keeps_its_bits() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    dcp(["convert", "quantized", &at("o"), "--to=dcp", "--dequantize=bf16"])
        .fails(2, &["\"qint8\" is qint8 of PyTorch", "the library that quantized them"]);
    fs::create_dir(at("m")).unwrap();
    let out = at("o");
    for (method, config, exact, cast) in schemes() {
        let all: Vec<_> = exact.iter().chain(cast).copied().collect();
        weights(at("m/model.safetensors").as_ref(), &all, &Value::Null);
        fs::write(at("m/config.json"), config.to_string()).unwrap();
        for more in [&["--to=hf"][..], &["--to=dcp"], &["--to=torch-dist", "--arch=llama"]] {
            let dequantize = ["convert", &at("m"), &out, "--dequantize=bf16"];
            dcp(dequantize.iter().copied().chain(more.iter().copied()))
                .fails(2, &[method, "--dequantize", "the library that quantized them"]);
        }
        for more in [&[][..], &["--allow-left-over"]] {
            let mapped = ["convert", &at("m"), &out, "--to=torch-dist", "--arch=llama"];
            dcp(mapped.iter().copied().chain(more.iter().copied()))
                .fails(2, &["the model is quantized: "]);
        }
        assert!(!folder.path().join("o").exists(), "{method}");
        dcp(["-q", "convert", &at("m"), &out, "--to=hf", "--dtype=f16"]).ok();
        let mut expected = dtypes(&at("m"));
        for (name, ..) in cast {
            expected.insert((*name).to_owned(), "float16".to_owned());
        }
        assert_eq!(dtypes(&out), expected, "{method}");
        fs::remove_dir_all(&out).unwrap();
    }
}

/// The mean of codes times the mean of scales is not the mean of their products.
#[test]
fn quantized_weights_have_no_average() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let out = at("o.safetensors");
    for (method, _, exact, cast) in schemes() {
        let all: Vec<_> = exact.iter().chain(cast).copied().collect();
        let (a, b) = (at("a.safetensors"), at("b.safetensors"));
        weights(a.as_ref(), &all, &Value::Null);
        let average = |b: &str| dcp(["-q", "average", &a, b, "--out", &out, "--overwrite"]);
        average(&a).ok();
        dcp(["diff", &a, &out]).ok();
        let mut bytes = fs::read(&a).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let start = 8 + usize::try_from(header).unwrap();
        let mut end = start;
        // Codes or scales alone differ.
        for (name, dtype, size, shape) in exact {
            end += shape.iter().product::<usize>() * size;
            bytes[end - 1] ^= 1;
            fs::write(&b, &bytes).unwrap();
            let why = "a quantized weight has no average: --dequantize";
            // Integers never have one.
            let why = if dtype.contains('F') { why } else { "incompatible" };
            average(&b).fails(2, &[name, why]);
            bytes[end - 1] ^= 1;
        }
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&b, &bytes).unwrap();
        assert_eq!(average(&b).code, 0, "{method}");
    }
}
