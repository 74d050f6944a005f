from .exporting import export as export
from .gallery import shareable as shareable
from .gallery import without_places as without_places
from .gallery import write_data_set as write_data_set
from .gallery import write_gallery as write_gallery
