//! Jobs on checkpoints that were opened for some of their keys.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use dcp_core::registry::{Access, StorageRegistry};
use dcp_jobs::diff::DiffOptions;
use dcp_jobs::keys::{Rename, StatePart};
use dcp_jobs::{Checkpoint, Destination, Error, Format, Keys, Need, Opener, Selection};
use dcp_planner::KeyFilter;
use dcp_storage_fs::FsStorage;

fn opener() -> Opener {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    dcp::opener(storages).need(Need::Whole)
}

async fn open(url: &str) -> Checkpoint {
    opener().open(url).await.unwrap()
}

/// Opened for the keys that a conversion takes.
async fn open_for(url: &str, keys: &Keys, format: Format) -> Result<Checkpoint, Error> {
    opener().open_keys(url, keys.needed(format).unwrap()).await
}

/// What a conversion of these keys writes and reports.
async fn converted(checkpoint: &Checkpoint, keys: Keys, to: &Path) -> (Vec<u8>, String) {
    let target = to.display().to_string();
    let conversion = checkpoint.convert(Destination::new(&target).overwrite(true)).keys(keys);
    match conversion.run().await {
        Ok(written) => (fs::read(to).unwrap(), format!("{:?} {:?}", written.report, written.notes)),
        Err(error) => (Vec::new(), format!("{error:?}")),
    }
}

#[tokio::test]
async fn a_checkpoint_of_the_needed_keys_gives_what_the_whole_one_gives() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out.safetensors");
    let map = [("model.norm.weight".to_owned(), Some("n".to_owned()))];
    let unknown = [("model.nrom.weight".to_owned(), None)];
    let rename = |text| Rename::parse(text).unwrap();
    let mut without = 0;
    for fixture in ["pytorch/fsdp2_adam_2r", "pytorch/tp_fsdp_2x2", "pytorch/t21_nested"] {
        let fixture = dcp_testing::fixture(fixture);
        let url = fixture.display().to_string();
        let all = open(&url).await;
        for keys in [
            Keys::all().part(StatePart::Model),
            Keys::all().include("model.*"),
            Keys::all().include("model.norm"),
            Keys::all().include("model.norm").part(StatePart::Model),
            Keys::all().exclude("optimizer").exclude("optim"),
            Keys::all().part(StatePart::WithoutOptimizer),
            Keys::all().include("*norm*").rename(rename(r"s/^model\.//")),
            Keys::all().include("model.nrom").include("model.norm"),
            Keys::all().include("nothing"),
            Keys::all().map(map.clone().into_iter().collect()),
            Keys::all().include("model.norm").map(map.clone().into_iter().collect()),
            Keys::all().include("model.norm").map(unknown.clone().into_iter().collect()),
            Keys::all().rename(rename("s/.*/same/")),
        ] {
            let some = open_for(&url, &keys, Format::Safetensors).await.unwrap();
            without += usize::from(some.source().lacks_tensors());
            let expected = converted(&all, keys.clone(), &target).await;
            assert_eq!(converted(&some, keys.clone(), &target).await, expected, "{keys:?}");
        }
    }
    assert!(without > 12, "{without} were opened without some tensors");
}

/// A checkpoint of two ranks, of which the first alone has `one`, and a copy without the data of the
/// second.
async fn half(folder: &Path) -> (String, String) {
    let header = br#"{"one":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"wide":{"dtype":"F32","shape":[4,2],"data_offsets":[4,36]}}"#;
    let len = (header.len() as u64).to_le_bytes();
    let file = folder.join("model.safetensors");
    fs::write(&file, [&len[..], header, &[7; 36]].concat()).unwrap();
    let at = |name: &str| folder.join(name).display().to_string();
    let model = open(&file.display().to_string()).await;
    for name in ["whole", "half"] {
        let target = Destination::new(at(name)).to(Format::Dcp).ranks(2);
        model.convert(target).run().await.unwrap();
    }
    fs::remove_file(folder.join("half/__1_0.distcp")).unwrap();
    (at("whole"), at("half"))
}

#[tokio::test]
async fn jobs_on_some_keys_need_no_file_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, half) = half(folder.path()).await;
    opener().open(&half).await.unwrap_err();
    let keys = Keys::all().include("one");
    let some = open_for(&half, &keys, Format::Dcp).await.unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    some.convert(at("one.safetensors")).keys(keys.clone()).run().await.unwrap();
    some.reshard(at("one")).ranks(1).keys(keys.clone()).run().await.unwrap();
    let soup = [open_for(&half, &keys, Format::Dcp).await.unwrap(), open(&whole).await];
    dcp_jobs::combine::average(&soup, at("soup.safetensors")).keys(keys).run().await.unwrap();

    let selection = Selection::all().with_include(KeyFilter::any_of(["one"]));
    let stats = some.stats().selection(selection).run().await.unwrap();
    assert_eq!(stats.tensors.len(), 1);
    assert_eq!(some.stats().key("one".to_owned()).run().await.unwrap().tensors, stats.tensors);
    let mut options = DiffOptions::default();
    options.include = KeyFilter::any_of(["one"]);
    let whole = open(&whole).await;
    assert!(some.diff(&whole).options(options.clone()).run().await.unwrap().equal);
    let needed = options.needed(&options.a);
    let again = opener().open_keys(&half, needed).await.unwrap();
    assert!(whole.diff(&again).options(options).run().await.unwrap().equal);
}

/// What a job needs, and not what the caller thought, decides what is read and checked.
#[tokio::test]
async fn a_job_on_other_keys_reads_and_checks_them() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, half) = half(folder.path()).await;
    let one = Keys::all().include("one");
    let target = || folder.path().join("x.safetensors").display().to_string();
    for url in [&whole, &half] {
        let some = open_for(url, &one, Format::Dcp).await.unwrap();
        let all = some.convert(target()).run().await;
        let wide = some.stats().key("wide".to_owned()).run().await;
        let exclude = Selection::all().with_exclude(KeyFilter::any_of(["one"]));
        let other = some.stats().selection(exclude).run().await;
        let reshard = some.reshard(format!("{url}-again")).ranks(1).run().await;
        let diff = some.diff(&some).run().await;
        if *url == whole {
            assert_eq!(all.unwrap().report.tensors, 2);
            assert_eq!(reshard.unwrap().report.tensors, 2);
            assert_eq!(other.unwrap().tensors.len(), 1);
            assert_eq!(diff.unwrap().compared.tensors, 2);
            continue;
        }
        let errors = [all.err(), reshard.err(), other.err(), diff.err()];
        for error in errors.into_iter().map(Option::unwrap) {
            let text = format!("{error:?}");
            assert!(text.contains("__1_0.distcp"), "{text}");
        }
        // The statistics of one tensor first look for it among those that are there.
        assert!(wide.is_err());
    }
}

/// A target is kept apart from every file of the source, not only from those of the chosen keys.
#[tokio::test]
async fn no_file_of_the_source_is_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, _) = half(folder.path()).await;
    let keys = Keys::all().include("one");
    let some = open_for(&whole, &keys, Format::Dcp).await.unwrap();
    let files = some.source().names().await.unwrap().files().len();
    let of_keys = some.source().metadata().await.unwrap().files().len();
    assert_eq!((files, of_keys), (2, 1));
    let target = Destination::new(format!("{whole}/__1_0.distcp")).overwrite(true);
    let error = some.convert(target.to(Format::Safetensors)).keys(keys).run().await.unwrap_err();
    assert!(error.to_string().contains("is a file of the source"), "{error}");
}
