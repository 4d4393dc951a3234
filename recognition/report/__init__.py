"""The page that shows a run, ``report.html`` in its folder.

run_folder    what the files of a run say
sources       network, images and packs, of a run that trains or from its folder
measures      what is computed anew: z_y, class weights, how old class rows are
class_images  names and pictures of classes
verdict       in plain words: how the run went, and what to try next
charts        the figures
sections      text, tables and figures, section by section
writing       the page, and when a run writes it
"""

from dsoftmax.recognition.report.writing import RunReport, write_report

__all__ = ["RunReport", "write_report"]
