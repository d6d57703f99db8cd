"""What MedMNIST publishes of its two-dimensional datasets: tasks, classes, counts, and the MD5 sum of every file.

All entries are those of ``medmnist/info.py`` in MedMNIST 3.0.2 (Yang et al., MedMNIST v2, Scientific Data 2023). A file
has images of one side: ``NAME.npz`` of 28 pixels, ``NAME_64.npz`` of 64, and so on.
"""

from typing import NamedTuple

PLACE = "https://zenodo.org/records/10519652/files/"
QUERY = "?download=1"
SIDES = (28, 64, 128, 224)
PARTS = ("train", "val", "test")
ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left", "lung-right",
    "pancreas", "spleen",
)  # fmt: skip
MULTI_LABEL = {
    "chestmnist": "an image of chestmnist may show several of its 14 findings, or none, and networks here tell one "
    "class of each image: it is not supported"
}


class MedMNIST(NamedTuple):
    """One dataset."""

    title: str
    task: str  # "multi-class", "binary" or "ordinal"
    channels: int
    classes: tuple[str, ...]
    counts: tuple[int, int, int]  # images to train, to validate and to test
    md5: tuple[str, str, str, str]  # of the file of each of SIDES
    about: str


TABLE = {
    "pathmnist": MedMNIST(
        "PathMNIST", "multi-class", 3,
        (
            "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
            "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
        ),
        (89996, 10004, 7180),
        (
            "a8b06965200029087d5bd730944a56c1", "55aa9c1e0525abe5a6b9d8343a507616",
            "ac42d08fb904d92c244187169d1fd1d9", "2c51a510bcdc9cf8ddb2af93af1eadec",
        ),
        "107,180 patches of colon tissue",
    ),
    "dermamnist": MedMNIST(
        "DermaMNIST", "multi-class", 3,
        (
            "actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions",
            "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions",
        ),
        (7007, 1003, 2005),
        (
            "0744692d530f8e62ec473284d019b0c7", "b70a2f5635c6199aeaa28c31d7202e1f",
            "2defd784463fa5243564e855ed717de1", "8974907d8e169bef5f5b96bc506ae45d",
        ),
        "10,015 images of skin lesions",
    ),
    "octmnist": MedMNIST(
        "OCTMNIST", "multi-class", 1,
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        (97477, 10832, 1000),
        (
            "c68d92d5b585d8d81f7112f81e2d0842", "e229e9440236b774d9f0dfef9d07bdaf",
            "0a97e76651ace45c5d943ee3f65b63ae", "abc493b6d529d5de7569faaef2773ba3",
        ),
        "109,309 optical coherence tomographies of retinas",
    ),
    "pneumoniamnist": MedMNIST(
        "PneumoniaMNIST", "binary", 1, ("normal", "pneumonia"), (4708, 524, 624),
        (
            "28209eda62fecd6e6a2d98b1501bb15f", "8f4eceb4ccffa70c672198ea285246c6",
            "05b46931834c231683c68f40c47b2971", "d6a3c71de1b945ea11211b03746c1fe1",
        ),
        "5,856 X-rays of children's chests",
    ),
    "retinamnist": MedMNIST(
        "RetinaMNIST", "ordinal", 3, ("0", "1", "2", "3", "4"), (1080, 120, 400),
        (
            "bd4c0672f1bba3e3a89f0e4e876791e4", "afda852cc34dcda56f86ad2b2457dbcc",
            "e48e916a24454daf90583d4e6efb1a18", "eae7e3b6f3fcbda4ae613ebdcbe35348",
        ),
        "1,600 photographs of retinas, in five grades",
    ),
    "breastmnist": MedMNIST(
        "BreastMNIST", "binary", 1, ("malignant", "normal, benign"), (546, 78, 156),
        (
            "750601b1f35ba3300ea97c75c52ff8f6", "742edef2a1fd1524b2efff4bd7ba9364",
            "363e4b3f8d712e9b5de15470a2aaadf1", "b56378a6eefa9fed602bb16d192d4c8b",
        ),
        "780 ultrasound images of breasts",
    ),
    "bloodmnist": MedMNIST(
        "BloodMNIST", "multi-class", 3,
        (
            "basophil", "eosinophil", "erythroblast",
            "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)", "lymphocyte", "monocyte",
            "neutrophil", "platelet",
        ),
        (11959, 1712, 3421),
        (
            "7053d0359d879ad8a5505303e11de1dc", "2b94928a2ae4916078ca51e05b6b800b",
            "adace1e0ed228fccda1f39692059dd4c", "b718ff6835fcbdb22ba9eacccd7b2601",
        ),
        "17,092 blood cells",
    ),
    "tissuemnist": MedMNIST(
        "TissueMNIST", "multi-class", 1,
        (
            "Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells",
            "Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments",
            "Thick Ascending Limb",
        ),
        (165466, 23640, 47280),
        (
            "ebe78ee8b05294063de985d821c1c34b", "123ece2eba09d0aa5d698fda57103344",
            "61b955355d7425a89687b06cca3ce0c2", "b077128c4a949f0a4eb01517f9037b9c",
        ),
        "236,386 cells of kidneys",
    ),
    "organamnist": MedMNIST(
        "OrganAMNIST", "multi-class", 1, ORGANS, (34561, 6491, 17778),
        (
            "68e3f8846a6bd62f0c9bf841c0d9eacc", "2dcccc29b88e6da5a01161ef20cda288",
            "eeae80d0a227a8d099027e1b3cfd3b60", "50747347e05c87dd3aaf92c49f9f3170",
        ),
        "58,830 axial slices of organs",
    ),
    "organcmnist": MedMNIST(
        "OrganCMNIST", "multi-class", 1, ORGANS, (12975, 2392, 8216),
        (
            "b9ceb9546e10131b32923c5bbeaea2b1", "3ce34a8724ea6f548e6db4744d03b6a9",
            "773c1f009daa3fe5d9a2a201b2a7ed94", "050f5e875dc056f6768abf94ec9995d1",
        ),
        "23,583 coronal slices of organs",
    ),
    "organsmnist": MedMNIST(
        "OrganSMNIST", "multi-class", 1, ORGANS, (13932, 2452, 8827),
        (
            "9ab87b696fb54e2a387ebe992d6ed5f1", "53a6d115339d874c25e309a994ff46d3",
            "ded0c5fa01a95dc4978b956f613e9b8e", "b354719e553fbbb2513d5533f52a4cb1",
        ),
        "25,211 sagittal slices of organs",
    ),
}  # fmt: skip


def file_name(name: str, side: int) -> str:
    return f"{name}.npz" if side == SIDES[0] else f"{name}_{side}.npz"
