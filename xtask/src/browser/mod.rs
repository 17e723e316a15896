//! Pages of `dcp report` in a real browser: that they draw what the checkpoint holds, that the
//! search finds, and that no text of a checkpoint becomes anything but text.

mod chromium;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Map, Value, json};

use crate::browser::chromium::Chromium;
use xtask_host::process::{self, Scratch};
use xtask_host::{Result, workspace};

/// Names that would do something if they were more than text.
const HOSTILE: [&str; 10] = [
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror=\"window.pwned = 2\">",
    "\"><svg onload=\"window.pwned = 3\">",
    "javascript:window.pwned=4",
    "{script}{data}",
    "a.<b>bold</b>.w",
    "__proto__.polluted",
    "constructor",
    "",
    "a..b",
];
/// Tensors of the large checkpoint.
const MANY: usize = 5000;

pub(crate) fn main(args: &[&str]) -> Result {
    let keep = match args {
        [] => false,
        ["--keep"] => true,
        _ => return Err("usage: cargo xtask browser [--keep]".into()),
    };
    let Some(program) = chromium::find() else {
        println!("SKIPPED: there is no Chromium here; Debian has it as the package chromium");
        return Ok(());
    };
    workspace::build()?;
    let scratch = Scratch::new(&std::env::temp_dir(), "dcp-browser", keep)?;
    let mut browser = Chromium::start(program, scratch.path())?;
    for (name, check) in CHECKS {
        check(&mut browser, scratch.path()).map_err(|error| format!("{name}: {error}"))?;
        let complaints = browser.complaints();
        if !complaints.is_empty() {
            return Err(format!("{name}: the page complains: {}", complaints.join("; ")).into());
        }
        println!("{name}: fine");
    }
    Ok(())
}

type Check = fn(&mut Chromium, &Path) -> Result;

const CHECKS: [(&str, Check); 6] = [
    ("a page draws every tensor of a checkpoint", draws_every_tensor),
    ("histograms have a column for every power of two", histograms),
    ("the keyboard moves and chooses", keyboard),
    ("names are text", names_are_text),
    ("many keys are searched, few are drawn", many_keys),
    ("a page fits a narrow window and both themes", narrow),
];

fn draws_every_tensor(browser: &mut Chromium, folder: &Path) -> Result {
    for fixture in ["tp_fsdp_2x2", "dtensor_uneven_4r", "objects"] {
        let uri = workspace::root().join("fixtures/pytorch").join(fixture);
        let summary: Value = serde_json::from_str(&dcp(["inspect", path(&uri), "--json"])?)?;
        let keys = summary["keys"].as_object().ok_or("no keys")?;
        browser.open(&report(&uri, folder)?)?;
        let counted = browser.eval("document.getElementById('count').textContent")?;
        same("the count", &counted, &json!(format!("{} keys", keys.len())))?;
        for (name, key) in keys {
            let shown = browser.eval(&format!(
                "new Promise((resolve) => {{ \
                   location.hash = '#' + encodeURIComponent({}); \
                   setTimeout(() => resolve({{ \
                     name: document.querySelector('#detail h2').textContent, \
                     rects: document.querySelectorAll('#detail rect.chunk').length, \
                     rows: document.querySelectorAll('#detail tbody tr').length, \
                     chosen: document.querySelectorAll('#tree .row.on').length, \
                   }}), 0); }})",
                json!(name)
            ))?;
            let chunks = key["chunks"].as_array().map(Vec::as_slice).unwrap_or_default();
            let is_empty = |chunk: &&Value| {
                chunk["sizes"].as_array().is_some_and(|sizes| sizes.contains(&json!(0)))
            };
            let flat = key["shape"].as_array().is_none_or(Vec::is_empty);
            let drawn = chunks.iter().filter(|chunk| !flat && !is_empty(chunk)).count();
            let expected =
                json!({ "name": name, "rects": drawn, "rows": chunks.len(), "chosen": 1 });
            same(&format!("{fixture} {name}"), &shown, &expected)?;
        }
    }
    Ok(())
}

fn histograms(browser: &mut Chromium, folder: &Path) -> Result {
    let uri = workspace::root().join("fixtures/pytorch/fsdp2_adam_2r");
    let page = folder.join("stats.html");
    dcp(["report", path(&uri), "--stats", "-o", path(&page)])?;
    let stats: Value = serde_json::from_str(&dcp(["stats", path(&uri), "--json"])?)?;
    browser.open(&page)?;
    for name in ["model.embed.weight", "optimizer.state.embed.weight.exp_avg_sq"] {
        let shown = browser.eval(&format!(
            "new Promise((resolve) => {{ \
               location.hash = '#' + encodeURIComponent({}); \
               setTimeout(() => resolve([ \
                 document.querySelectorAll('#detail .histogram .up').length, \
                 document.querySelectorAll('#detail .histogram .down').length, \
               ]), 20); }})",
            json!(name)
        ))?;
        let bins = stats["tensors"][name]["histogram"].as_array().ok_or("no histogram")?;
        let negative = bins.iter().filter(|bin| bin["negative"] != 0).count();
        same(name, &shown, &json!([bins.len(), negative]))?;
    }
    Ok(())
}

fn keyboard(browser: &mut Chromium, folder: &Path) -> Result {
    let uri = workspace::root().join("fixtures/pytorch/tp_fsdp_2x2");
    browser.open(&report(&uri, folder)?)?;
    let found = browser.eval(
        "(() => { \
           const press = (node, key) => node.dispatchEvent( \
             new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true })); \
           press(document, '/'); \
           const focused = document.activeElement.id; \
           document.getElementById('fold').click(); \
           const folded = document.querySelectorAll('#tree .row').length; \
           const tree = document.getElementById('tree'); \
           press(tree, 'Home'); press(tree, 'ArrowRight'); press(tree, 'ArrowDown'); \
           press(tree, 'Enter'); \
           const title = document.querySelector('#detail h2').textContent; \
           const map = document.querySelector('#detail rect.chunk'); \
           map.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: 9, clientY: 9 })); \
           const tip = document.getElementById('tip'); \
           return { focused, folded, title, tip: tip.textContent, lit: document.querySelectorAll('.lit').length }; })()",
    )?;
    let expected = json!({
        "focused": "search",
        "folded": 2,
        "title": "model.embed.weight",
        "tip": "[0:5, 0:8]\nrank 0\n__0_0.distcp\n1,705 bytes at 0",
        "lit": 2,
    });
    same("what was chosen", &found, &expected)
}

fn names_are_text(browser: &mut Chromium, folder: &Path) -> Result {
    let names: Vec<String> = HOSTILE.iter().map(|name| (*name).to_owned()).collect();
    // The name of the file is in the page, too.
    let file = folder.join("<svg onload='window.pwned = 5'>.safetensors");
    browser.open(&report(&safetensors(&file, &names)?, folder)?)?;
    let found = browser.eval(
        "new Promise((resolve) => setTimeout(() => resolve({ \
           pwned: window.pwned === undefined && Object.prototype.polluted === undefined, \
           elements: document.querySelectorAll('#tree img, #tree svg, #tree script, main b b, main img').length, \
           scripts: document.scripts.length, \
           title: document.querySelector('h1').textContent.includes('<svg onload='), \
           labels: [...document.querySelectorAll('#tree b')].map((b) => b.textContent).sort(), \
         }), 100))",
    )?;
    let mut labels: Vec<&str> = HOSTILE.to_vec();
    labels.retain(|name| !name.is_empty());
    labels.push("(no name)");
    labels.sort_unstable();
    let expected = json!({
        "pwned": true, "elements": 0, "scripts": 2, "title": true, "labels": labels,
    });
    same("the page of hostile names", &found, &expected)
}

fn many_keys(browser: &mut Chromium, folder: &Path) -> Result {
    let names: Vec<String> =
        (0..MANY).map(|n| format!("model.layers.{}.experts.{}.weight", n / 50, n % 50)).collect();
    let file = safetensors(&folder.join("many.safetensors"), &names)?;
    browser.open(&report(&file, folder)?)?;
    for (typed, counted) in
        [("layers.7. weight", "50 of 5,000 keys"), ("w*t", "5,000 of 5,000 keys")]
    {
        let found = browser.eval(&format!(
            "new Promise((resolve) => {{ \
               const search = document.getElementById('search'); \
               search.value = {}; \
               search.dispatchEvent(new Event('input')); \
               setTimeout(() => resolve(document.getElementById('count').textContent), 50); }})",
            json!(typed)
        ))?;
        same(typed, &found, &json!(counted))?;
    }
    let found = browser.eval(
        "new Promise((resolve) => { \
           const tree = document.getElementById('tree'); \
           const drawn = () => tree.querySelectorAll('.row').length; \
           tree.scrollTop = 1e9; \
           setTimeout(() => resolve({ \
             few: drawn() > 5 && drawn() < 120, \
             marks: tree.querySelectorAll('mark').length > 0, \
             last: [...tree.querySelectorAll('.row b')].pop().title, \
           }), 200); })",
    )?;
    let last = names.last().map(String::as_str);
    same("the end", &found, &json!({ "few": true, "marks": true, "last": last }))
}

fn narrow(browser: &mut Chromium, folder: &Path) -> Result {
    let uri = workspace::root().join("fixtures/pytorch/fsdp2_adam_2r");
    let page = report(&uri, folder)?;
    for width in [360, 900, 1920] {
        let metrics =
            json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false });
        browser.call("Emulation.setDeviceMetricsOverride", metrics)?;
        browser.open(&page)?;
        let found = browser.eval(
            "(() => { \
               document.querySelector('#detail .list button').click(); \
               return document.documentElement.scrollWidth - innerWidth; })()",
        )?;
        same(&format!("what is too wide for {width}"), &found, &json!(0))?;
    }
    browser.call("Emulation.clearDeviceMetricsOverride", json!({}))?;
    let found = browser.eval(
        "(() => { \
           const button = document.getElementById('theme'); \
           const ground = () => getComputedStyle(document.body).backgroundColor; \
           button.click(); \
           const light = ground(); \
           button.click(); \
           return [light !== ground(), document.documentElement.dataset.theme]; })()",
    )?;
    same("the themes", &found, &json!([true, "dark"]))
}

fn same(what: &str, found: &Value, expected: &Value) -> Result {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}:\nfound    {found}\nexpected {expected}").into())
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

fn dcp<'a>(args: impl IntoIterator<Item = &'a str>) -> Result<String> {
    process::output(Command::new(workspace::target()?.join("debug/dcp")).args(args))
}

/// The page of a checkpoint.
fn report(uri: &Path, folder: &Path) -> Result<PathBuf> {
    let page = folder.join("report.html");
    dcp(["report", path(uri), "-o", path(&page), "--overwrite"])?;
    Ok(page)
}

/// A file with small tensors of these names.
fn safetensors(file: &Path, names: &[String]) -> Result<PathBuf> {
    let mut header = Map::new();
    for (index, name) in names.iter().enumerate() {
        let info = json!({
            "dtype": "F32", "shape": [1, 2], "data_offsets": [index * 8, index * 8 + 8],
        });
        header.insert(name.clone(), info);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + names.len() * 8, 0);
    fs::write(file, bytes)?;
    Ok(file.to_owned())
}
